"""What `flush` still has to tell: messages that were dropped, and whose promise nobody has awaited."""

from mmrender.errors import ShippingError
from mmrender.shipping.delivery import Delivery

MAX_FAILURES = 1024


class Failures:
    """Deliveries that failed, in order, less those whose error somebody was told.

    Args:
        most: Most to keep. Of those beyond, the error of the first is kept as that of the sender.
    """

    def __init__(self, most: int = MAX_FAILURES) -> None:
        self._most = most
        self._untold: list[Delivery] = []
        self._general: ShippingError | None = None

    def __bool__(self) -> bool:
        self._forget_told()
        return bool(self._untold) or self._general is not None

    def add(self, delivery: Delivery) -> None:
        """Note one that has failed."""
        if len(self._untold) >= self._most:
            self._forget_told()
        if len(self._untold) < self._most:
            self._untold.append(delivery)
        elif delivery.error is not None:
            self.add_general(delivery.error)

    def add_general(self, error: ShippingError) -> None:
        """Note an error of the sender as a whole, which is told even where deliveries have raised it."""
        self._general = self._general or error

    def take(self) -> ShippingError | None:
        """Give the first error that nobody was told, and forget all."""
        self._forget_told()
        error = self._untold[0].error if self._untold else self._general
        self._untold, self._general = [], None
        return error

    def _forget_told(self) -> None:
        self._untold = [delivery for delivery in self._untold if not delivery.told]
