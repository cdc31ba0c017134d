from .report import AuditReport as AuditReport
from .run import audit as audit
from .trainer import TrainerModel as TrainerModel
from .watch import Watch as Watch
