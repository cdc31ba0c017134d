from .inspect import inspect_sample as inspect_sample
from .report import AuditReport as AuditReport
from .report import Finding as Finding
from .run import audit as audit
from .run import measure_noise as measure_noise
from .trainer import TrainerModel as TrainerModel
