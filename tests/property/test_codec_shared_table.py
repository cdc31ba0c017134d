"""Two tables that never talk stay equal, and a loss is noticed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcodecs

# Keys 0 to 7 stand for arrays of 300 to 3100 bytes.
ITEMS = [np.full(300 + 400 * number, number, np.uint8) for number in range(8)]
messages = st.lists(
    st.tuples(st.lists(st.integers(0, 7), max_size=5), st.booleans()), min_size=1, max_size=25
)


def value(numbers: list[int]) -> list[mmcodecs.Shared]:
    return [mmcodecs.Shared(ITEMS[number], bytes([number])) for number in numbers]


@settings(max_examples=200)
@given(messages, st.integers(0, 9000))
def test_tables_agree_without_talking(sent: list[tuple[list[int], bool]], capacity: int) -> None:
    encoder, decoder = mmcodecs.Encoder(table_bytes=capacity), mmcodecs.Decoder(table_bytes=9000)
    for numbers, _ in sent:
        got = decoder.decode(encoder.encode_frames(value(numbers)))
        assert [array[0] for array in got] == numbers
        assert list(encoder._table.entries) == list(decoder._table.entries)
        assert encoder._table.total_bytes == decoder._table.total_bytes <= capacity


@settings(max_examples=200)
@given(messages, st.integers(3000, 9000), st.booleans())
def test_a_lost_message_is_an_error_or_costs_nothing(
    sent: list[tuple[list[int], bool]], capacity: int, keep_views: bool
) -> None:
    encoder = mmcodecs.Encoder(table_bytes=capacity)
    decoder = mmcodecs.Decoder(table_bytes=9000, keep_views=keep_views)
    noticed: set[bytes] = set()
    for numbers, lost in sent:
        message = encoder.encode(value(numbers))
        if lost:
            continue
        try:
            got = decoder.decode(message)
        except mmcodecs.MissingKeyError as missing:
            noticed.update(missing.keys)
            encoder.reset()
            decoder.reset()
            got = decoder.decode(encoder.encode(value(numbers)))
        assert [array[0] for array in got] == numbers
        assert decoder._table.total_bytes <= capacity
    assert not noticed or any(lost for _, lost in sent)
