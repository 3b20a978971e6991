-- ARGV: episode, fence, packed outcome, 1 if it may be tried again. Returns 1 try again, 0 given up, -1 lease lost.
local name, fence, outcome, again = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local e, other = owned(name, fence)
if not e then
  if other.failed_fence == fence then return tonumber(other.failed_result) end
  return -1
end
local attempt = redis.call('HINCRBY', episode_key(name), 'attempt', 1)
local retry = again and attempt < metan('max_attempts')
redis.call('HSET', episode_key(name), 'failed_fence', fence, 'failed_result', retry and 1 or 0)
if retry then
  requeue_episode(name, e)
  bump('retried', 1)
  return 1
end
redis.call('ZREM', P .. ':leases', name)
redis.call('HSET', episode_key(name), 'state', 'failed')
redis.call('HSET', P .. ':dead', name, cmsgpack.pack({outcome, attempt}))
if redis.call('EXISTS', journal_key(name)) == 1 then
  redis.call('RENAME', journal_key(name), P .. ':deadjournal:' .. name)
end
if e.lane == 'train' then
  bump('failed', 1)
  end_member(e.task, false)
else
  redis.call('HINCRBY', P .. ':out:' .. e.lane, 'leased', -1)
end
return 0
