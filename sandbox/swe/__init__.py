"""Repositories to repair: a task's snapshot in a box, the model's patch out of it, hidden tests in a fresh one."""

from penstock.sandbox.swe.check import TaskCheck, check_task
from penstock.sandbox.swe.environment import SweEnvironment
from penstock.sandbox.swe.errors import PatchError, SweTaskError
from penstock.sandbox.swe.grade import grade
from penstock.sandbox.swe.limits import SweLimits
from penstock.sandbox.swe.report import Grade
from penstock.sandbox.swe.task import SweTask, load_tasks

__all__ = [
    "Grade",
    "PatchError",
    "SweEnvironment",
    "SweLimits",
    "SweTask",
    "SweTaskError",
    "TaskCheck",
    "check_task",
    "grade",
    "load_tasks",
]
