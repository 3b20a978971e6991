from .client_models import ClientModels as ClientModels
from .data import BadRequestData as BadRequestData
from .data import Datum as Datum
from .data import Forward as Forward
from .data import LossCall as LossCall
from .losses import LOSSES as LOSSES
from .settings import check_settings as check_settings
