"""The command `mmrender`: commands, which need the extra `cli`, and help, which does not."""
