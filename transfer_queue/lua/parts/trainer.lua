-- Only the trainer may write the run's steps. Asking for that first refuses everybody else before anything has changed:
-- Redis takes back nothing of a script that it stops half-way. It is also what `full` is for the others: a first write
-- that a full Redis allows.
call('HDEL', STEPS, 'nothing')
