-- ARGV: episode, fence, newest version in it (-1: none), 1 if it carries a reward, bytes of its payload.
-- Returns 1 accepted (or repeated), 0 lease lost, -1 a version from the future.
local name, fence, newest, rewarded, bytes = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1', tonumber(ARGV[5])
local e, other = owned(name, fence)
if not e then
  return (other.state == 'completed' and other.fence == fence) and 1 or 0
end
if newest > metan('version') then return -1 end
redis.call('HSET', episode_key(name), 'state', 'completed', 'rewarded', ARGV[4], 'bytes', bytes)
redis.call('ZREM', P .. ':leases', name)
redis.call('DEL', journal_key(name))
bump('bytes', bytes)
if e.lane == 'train' then
  bump('completed', 1)
  redis.call('SADD', P .. ':held', name)
  end_member(e.task, rewarded)
else
  redis.call('HINCRBY', P .. ':out:' .. e.lane, 'leased', -1)
  redis.call('RPUSH', P .. ':results:' .. e.lane, name)
end
return 1
