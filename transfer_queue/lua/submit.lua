-- ARGV: lane, cursor ('' for none), then task_id, packed task, min_version for each task. Returns how many were new.
local lane, cursor = ARGV[1], ARGV[2]
if cursor ~= '' then
  if tonumber(cursor) <= metan('cursor') then return 0 end
  redis.call('HSET', META, 'cursor', cursor)
end
local new = 0
for i = 3, #ARGV, 3 do
  local task, packed, min_version = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('HSETNX', P .. ':tasks', task, packed) == 1 then
    new = new + 1
    local order = bump('submitted', 1)
    if lane == 'train' then
      redis.call('HSET', group_key(task), 'state', 'queued', 'order', order, 'min_version', min_version)
      redis.call('ZADD', P .. ':queue', order, task)
    else
      local name = task .. '#0'
      redis.call('SADD', P .. ':lanes', lane)
      redis.call('HSET', episode_key(name), 'state', 'queued', 'lane', lane, 'task', task, 'order', order,
        'member', 0, 'attempt', 0, 'min_version', min_version)
      redis.call('ZADD', P .. ':lane:' .. lane, order, name)
    end
  end
end
return new
