-- needs: run, server, episode, queue
-- Returns a packed map of everything that `Status` is made of; hashes as flat lists.
local now, quotas = now_ms(), quota_of()

-- How long the first group of some sorted sets has been in its state, in ms; -1 where there is none.
local function age(sets)
  local oldest = -1
  for _, set in ipairs(sets) do
    local first = call('ZRANGE', set, 0, 0)[1]
    if first then oldest = math.max(oldest, now - tonumber(call('HGET', group_key(first), 'at'))) end
  end
  return oldest
end

return cmsgpack.pack({
  run = {run.version, run.next_step, run.committed_step, run.groups_per_step, run.group_size},
  counters = call('HGETALL', key('counters')),
  queued = count_queued(quotas),
  parked = count_parked(quotas),
  admitted = call('ZCARD', key('admitted')),
  ready = call('ZCARD', key('ready')),
  open = call('ZCARD', key('open:train')),
  ages = {queued = age(queue_keys(quotas, true)), admitted = age({key('admitted')}), ready = age({key('ready')})},
  counts = call('HGETALL', key('counts')),
  lengths = call('HGETALL', key('lengths')),
  waits = call('HGETALL', key('waits')),
  workers = call('HGETALL', key('workers')),
  splits = call('HGETALL', key('splits')),
})
