"""Trajectories, and whatever else the codec can encode, from the workers to the process that trains.

```python
async def train(samples):                      # the trainer
    async with Receiver("unix:///tmp/rollouts.sock") as receiver:
        async for message in receiver:
            samples.extend(message.value.samples())

async def work(trajectory):                    # a worker
    async with Sender("unix:///tmp/rollouts.sock") as sender:
        await sender.send(trajectory)
```
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
