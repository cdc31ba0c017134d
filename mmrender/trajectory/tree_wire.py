"""Trajectories as plain data for the codec, files and sockets, and back.

```python
encoder, decoder = mmcodecs.Encoder(), mmcodecs.Decoder()
frames = encoder.encode_frames(group_to_wire(trajectories))  # pixels are not copied, nor sent twice
group_from_wire(decoder.decode(frames))                      # equal trees; pixels are views
```

The form is a dict of lists, scalars and arrays:

- `format` and `version`.
- `items`: the distinct media items of all trajectories, as `mmrender.media.wire.items_to_wire` writes them.
- `messages`: the distinct messages, as chunks of rows; see `mmrender.trajectory.row_chunks`. A step names its
  new ones by row in `message_rows`, int32 `[M]`.
- `tokens`, int32 `[T]`, and `logprobs`, float32 `[L]`: the pools that steps take theirs from, in order.
- `placeholders`, int32 `[P, 4]`, and `spans`, int32 `[S, 2]`: new media of the steps, in order, as
  `mmrender.media.wire.ranges_to_array` writes them. Offsets count from the first token of the prompt.
- `steps`, int32 `[N, 9]`: for each step of each trajectory its parent (a row of `steps`, -1 for a root); its
  base (the parent, or for a root a root of an earlier trajectory with the same first tokens, or -1); how many
  tokens it keeps of the base; how many prompt tokens, sampled tokens and media it adds; whether it has
  logprobs; how many messages it keeps of the parent's, and how many it adds.
- `details`: for each step its finish reason, reward and weight versions, as chunks of rows.
- `experts`: step, first position and array `[rows, layers, top_k]` for each step that brought router choices.
- `extras`: step and mapping, for each step that has one.
- `trajectories`: name, number of steps, reward, error and extra of each.

Pools are read from front to back and used up, so the form is linear in distinct content: an item, a token or
a message stands once, however many steps, branches and trajectories show it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from mmrender.errors import TrajectoryError
from mmrender.trajectory.message_wire import MediaSources
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_packing import TreePacker
from mmrender.trajectory.tree_unpacking import TreeUnpacker

FORMAT: Final = "mmrender.trees"
VERSION: Final = 1
_FIELDS: Final = frozenset(
    {
        "format",
        "version",
        "trajectories",
        "steps",
        "details",
        "experts",
        "extras",
        "tokens",
        "logprobs",
        "messages",
        "message_rows",
        "placeholders",
        "spans",
        "items",
    }
)


def group_to_wire(
    trajectories: Iterable[Trajectory], *, media_sources: MediaSources = "drop", share: bool = True
) -> dict[str, Any]:
    """Return trajectories as one plain form; what they have in common stands once.

    Arrays are those of the trajectories, not copies, the pools of tokens and log probabilities excepted.

    Args:
        trajectories: Such as the rollouts of a group.
        media_sources: `"drop"` puts None in place of images in messages, whose pixels stand in the items;
            `"keep"` carries messages as they are, with each image a second time.
        share: Whether the arrays of items are wrapped for an encoder with a table.

    Raises:
        TrajectoryError: A message holds something that has no plain form.
        MediaError: An item's class has no form on the wire, or its identity is no digest.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        **TreePacker(media_sources, share).pack(trajectories),
    }


def group_from_wire(wire: Any) -> list[Trajectory]:
    """Return the trajectories of `group_to_wire`. Arrays are views of those given.

    Raises:
        TrajectoryError: This is no such form, one of another version, or damaged.
        MediaError: An item or placeholder range is damaged.
    """
    marks = [wire.get(key) for key in ("format", "version")] if isinstance(wire, Mapping) else None
    # Compared as text, since a damaged form may hold anything here, arrays among them.
    if str(marks) != str([FORMAT, VERSION]):
        raise TrajectoryError(
            "these are no trajectories that can be read",
            where="packed",
            expected=f"format {FORMAT!r}, version {VERSION}",
            got=f"format {marks[0]!r}, version {marks[1]!r}"[:120] if marks else type(wire).__name__,
            remedy="Write and read with the same release of mmrender",
        )
    if set(wire) != _FIELDS:
        raise TrajectoryError(
            "the plain form of trajectories has other fields",
            where="packed",
            expected=", ".join(sorted(_FIELDS)),
            got=", ".join(sorted(map(str, wire))),
        )
    return TreeUnpacker(wire).trajectories()


def trajectory_to_wire(
    trajectory: Trajectory, *, media_sources: MediaSources = "drop", share: bool = True
) -> dict[str, Any]:
    """Return one trajectory as a plain form: `group_to_wire` of a single one.

    Raises:
        TrajectoryError: As `group_to_wire`.
        MediaError: As `group_to_wire`.
    """
    return group_to_wire([trajectory], media_sources=media_sources, share=share)


def trajectory_from_wire(wire: Any) -> Trajectory:
    """Return the trajectory of `trajectory_to_wire`.

    Raises:
        TrajectoryError: As `group_from_wire`, or the form holds another number of trajectories.
        MediaError: As `group_from_wire`.
    """
    found = group_from_wire(wire)
    if len(found) != 1:
        raise TrajectoryError(
            "the plain form holds a group",
            where="packed.trajectories",
            expected="one trajectory",
            got=str(len(found)),
            remedy="Use group_from_wire",
        )
    return found[0]
