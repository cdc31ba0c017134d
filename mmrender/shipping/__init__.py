"""Trajectories, and whatever else the codec can encode, from the workers to the process that trains.

```python
async with Receiver("unix:///tmp/rollouts.sock") as receiver:  # the trainer
    async for message in receiver:
        train(message.value)

async with Sender("unix:///tmp/rollouts.sock") as sender:      # a worker
    await sender.send(trajectory)
```
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
