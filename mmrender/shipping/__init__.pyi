from .receiver import Receiver as Receiver
from .recorder import Recorder as Recorder
from .sender import Sender as Sender
