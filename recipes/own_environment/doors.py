"""Three rooms in a row; a note in each names the door to the next one."""

import random

SETTINGS = {
    "model": "recipes/calculator/model",
    "agent.max_turns": 3,
    "agent.max_new_tokens": 24,
    "agent.max_response_tokens": 250,
    "agent.settings.action_pattern": "[1-7]",  # the last such digit of an answer is the action
    "rollout.max_model_len": 384,
    "trainer.steps": 80,
    "trainer.lr": 8e-4,
    "trainer.lr_schedule": "linear",
    "trainer.max_grad_norm": 0.3,
    "trainer.eps": 1e-3,
}


class Doors:
    def reset(self, seed):
        self.random, self.room = random.Random(seed), 1
        return self.note()

    def step(self, action):
        right = int(action) == self.door
        self.room += 1
        return self.note(), right / 3, self.room > 3  # observation, reward, end of the episode

    def note(self):
        self.door = self.random.randint(1, 7)
        return f"Room {self.room}. Take door {self.door}."
