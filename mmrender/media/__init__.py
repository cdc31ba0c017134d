"""Images and videos: loading under a policy, identity, processing, caching."""
