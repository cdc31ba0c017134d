"""Images and videos: any source to pixels under a policy, and to items equal to the model's own processor.

From bottom to top: `policy`, `sources` and `fetch` read encoded bytes, `load` and `video` decode them,
`pixels` and `levels` compute on arrays, `item` defines media items and `wire` their form in messages,
`processors` make them, and `resolve` does all of it for the media of a request and keeps the items.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
