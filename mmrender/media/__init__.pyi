from .encoded import ReferenceItem as ReferenceItem
from .wire import item_from_wire as item_from_wire
from .wire import item_to_wire as item_to_wire
