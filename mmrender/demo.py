"""`python -m mmrender.demo`: the demonstration."""

import sys

from mmrender.testing.demo import main

if __name__ == "__main__":
    sys.exit(main())
