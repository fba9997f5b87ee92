"""What is trained: a network for each kind of drafter, and how it computes what it would draft from."""

from specjax.training.tasks.draft_model_task import DraftModelTask
from specjax.training.tasks.eagle3_task import Eagle3Task
from specjax.training.tasks.head_only import HeadOnly
from specjax.training.tasks.hydra_task import HydraTask
from specjax.training.tasks.medusa_task import MedusaTask
from specjax.training.tasks.task import TrainingTask

__all__ = ["DraftModelTask", "Eagle3Task", "HeadOnly", "HydraTask", "MedusaTask", "TrainingTask"]
