"""The variations that an audit tries, in the order in which it tries them."""

from typing import Final

from mmrender.audit.computed import COMPUTED_VARIATIONS
from mmrender.audit.images import IMAGE_VARIATIONS
from mmrender.audit.tokens import TOKEN_VARIATIONS
from mmrender.audit.trial import Variation

GROUPS: Final[tuple[tuple[Variation, ...], ...]] = (TOKEN_VARIATIONS, IMAGE_VARIATIONS, COMPUTED_VARIATIONS)
"""What an audit tries together: it goes on to the next group where chance could have done what fits."""
VARIATIONS: Final[tuple[Variation, ...]] = tuple(variation for group in GROUPS for variation in group)
