"""Trajectories, and whatever else the codec can write, from the workers to the process that trains.

```python
async with Receiver("unix:///tmp/rollouts.sock") as receiver:  # the trainer
    async for message in receiver:
        train(message.value)

async with Sender("unix:///tmp/rollouts.sock") as sender:      # a worker
    await sender.send(trajectory)
```
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmrender.shipping.address import Address
    from mmrender.shipping.blocking import BlockingReceiver, BlockingSender
    from mmrender.shipping.delivery import Delivery, Received
    from mmrender.shipping.options import Timing, Window
    from mmrender.shipping.receiver import Receiver, ReceiverStats
    from mmrender.shipping.security import CurveKeys
    from mmrender.shipping.sender import Sender, SenderStats

_HOMES = {
    "Address": "address",
    "BlockingReceiver": "blocking",
    "BlockingSender": "blocking",
    "CurveKeys": "security",
    "Delivery": "delivery",
    "Received": "delivery",
    "Receiver": "receiver",
    "ReceiverStats": "receiver",
    "Sender": "sender",
    "SenderStats": "sender",
    "Timing": "options",
    "Window": "options",
}

__all__ = [
    "Address",
    "BlockingReceiver",
    "BlockingSender",
    "CurveKeys",
    "Delivery",
    "Received",
    "Receiver",
    "ReceiverStats",
    "Sender",
    "SenderStats",
    "Timing",
    "Window",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
