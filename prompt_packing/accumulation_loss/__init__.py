from .custom import register_loss
from .exact import ExactLossMixin
from .facts import LossFacts
