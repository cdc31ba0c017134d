from .causes import inspect_sample as inspect_sample
from .report import AuditReport as AuditReport
from .report import save_plot as save_plot
from .run import TrainerModel as TrainerModel
from .run import audit as audit
