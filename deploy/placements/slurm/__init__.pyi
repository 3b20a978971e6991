from .placement import place as place
from .placement import server_gpus as server_gpus
from .script import SlurmJob as SlurmJob
from .script import SlurmRecipe as SlurmRecipe
from .script import join_script as join_script
from .script import run_script as run_script
from .submit import write_secrets as write_secrets
