from .cache import MediaCache as MediaCache
from .item import ReferenceItem as ReferenceItem
from .load import load_image as load_image
from .policy import MediaPolicy as MediaPolicy
from .processor import MediaProcessor as MediaProcessor
from .processors.registry import load_processor as load_processor
from .wire import item_from_wire as item_from_wire
from .wire import item_to_wire as item_to_wire
