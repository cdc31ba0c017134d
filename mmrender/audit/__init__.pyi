from .report import AuditReport as AuditReport
from .run import Watch as Watch
from .run import audit as audit
from .trainer import TrainerModel as TrainerModel
