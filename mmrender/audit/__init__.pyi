from .causes import inspect_sample as inspect_sample
from .report import AuditReport as AuditReport
from .run import TrainerModel as TrainerModel
from .run import audit as audit
