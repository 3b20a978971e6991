"""The processes of one trainer: their collectives, what they agree on, and the watch over them."""
