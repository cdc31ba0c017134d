"""Many renderings at once: one set of tables, one media cache, a bounded number of threads."""

from mmrender.pool.pool import RendererPool
from mmrender.pool.sizes import PoolSizes

__all__ = ["PoolSizes", "RendererPool"]
