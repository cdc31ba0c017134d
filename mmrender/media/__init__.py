"""Images: any source to pixels under a policy, and to media items as the model's own processor makes them.

From bottom to top: `policy`, `sources` and `fetch` give encoded bytes; `load` decodes them; `pixels` and
`levels` hold arrays; `item` has the media items, and `wire` their form in messages; `processors` make them;
`resolve` does all of it for the media parts of a conversation, and keeps the items.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
