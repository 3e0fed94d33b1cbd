from .arguments import BudgetArguments, Seq2SeqTrainingArguments, TrainingArguments
from .collators import CollatorFacts
from .resume import ExactResumeMixin
from .trainer import Seq2SeqTrainer, TokenBudgetMixin, Trainer
