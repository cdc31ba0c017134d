"""The command `mmrender`: its commands, which need the extra `cli`, and its help, which needs nothing."""
