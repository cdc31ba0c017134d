"""Trajectories, and whatever else the codec can write, from the workers to the process that trains.

```python
async with Receiver("unix:///tmp/rollouts.sock") as receiver:  # the trainer
    async for message in receiver:
        train(message.value)

async with Sender("unix:///tmp/rollouts.sock") as sender:      # a worker
    await sender.send(trajectory)
```
"""

from typing import TYPE_CHECKING, Final

from mmrender._lazy import at_first_use

if TYPE_CHECKING:
    from mmrender.shipping.address import Address
    from mmrender.shipping.blocking import BlockingReceiver, BlockingSender
    from mmrender.shipping.delivery import Delivery, Received
    from mmrender.shipping.options import Timing, Window
    from mmrender.shipping.receiver import Receiver
    from mmrender.shipping.security import CurveKeys
    from mmrender.shipping.sender import Sender
    from mmrender.shipping.stats import ReceiverStats, SenderStats

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

_HOMES: Final = {
    "Address": "address",
    "BlockingReceiver": "blocking",
    "BlockingSender": "blocking",
    "CurveKeys": "security",
    "Delivery": "delivery",
    "Received": "delivery",
    "Receiver": "receiver",
    "ReceiverStats": "stats",
    "Sender": "sender",
    "SenderStats": "stats",
    "Timing": "options",
    "Window": "options",
}

__getattr__, __dir__ = at_first_use(__name__, _HOMES)
