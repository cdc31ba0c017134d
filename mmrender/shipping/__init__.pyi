from .blocking import BlockingReceiver as BlockingReceiver
from .blocking import BlockingSender as BlockingSender
from .receiver import Received as Received
from .receiver import Receiver as Receiver
from .receiver import ReceiverStats as ReceiverStats
from .sender import Sender as Sender
from .sender import SenderStats as SenderStats
