-- needs: run
-- Returns a packed map of everything that `Status` is made of; hashes as flat lists.
return cmsgpack.pack({
  run = call('HMGET', RUN, 'version', 'next_step', 'committed_step', 'bytes', 'groups_per_step', 'group_size'),
  queued = call('ZCARD', key('queue')),
  admitted = call('ZCARD', key('admitted')),
  ready = call('ZCARD', key('ready')),
  open = call('ZCARD', key('open:train')),
  counts = call('HGETALL', key('counts')),
  waits = call('HGETALL', key('waits')),
  workers = call('HGETALL', key('workers')),
  lanes = call('HGETALL', key('lanes')),
})
