"""mmcodecs: values that hold arrays, as bytes, without copying the arrays.

```python
import mmcodecs, numpy as np

message = mmcodecs.encode({"pixels": np.zeros((1024, 1536), np.float32), "grid": (1, 32, 32)})
mmcodecs.decode(message)["pixels"]  # a read-only view of `message`
```
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
