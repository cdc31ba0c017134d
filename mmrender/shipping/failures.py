"""What `flush` still has to tell: messages that were dropped, and whose promise nobody has awaited."""

from mmrender.errors import ShippingError
from mmrender.shipping.delivery import Delivery

MAX_FAILURES = 1024


class Failures:
    """Deliveries that failed, in order, less those whose error somebody was told.

    Args:
        most: Most to keep. Of those beyond, the error of the first is kept; it is told in any case.
    """

    def __init__(self, most: int = MAX_FAILURES) -> None:
        self._most = most
        self._untold: list[Delivery] = []
        self._beyond: ShippingError | None = None

    def __bool__(self) -> bool:
        self._forget_told()
        return bool(self._untold) or self._beyond is not None

    def add(self, delivery: Delivery) -> None:
        """Note one that has failed."""
        if len(self._untold) >= self._most:
            self._forget_told()
        if len(self._untold) < self._most:
            self._untold.append(delivery)
        elif self._beyond is None:
            self._beyond = delivery.error

    def take(self) -> ShippingError | None:
        """Give the first error that nobody was told, and forget all."""
        self._forget_told()
        error = self._untold[0].error if self._untold else self._beyond
        self._untold, self._beyond = [], None
        return error

    def _forget_told(self) -> None:
        self._untold = [delivery for delivery in self._untold if not delivery.told]
