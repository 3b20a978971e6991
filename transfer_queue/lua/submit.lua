-- needs: run, episode
-- ARGV: cursor ('' for none), then task id, lane, min_version, packed task, … Returns how many tasks were new.
local cursor = ARGV[1]
if cursor ~= '' and tonumber(cursor) <= tonumber(call('HGET', RUN, 'cursor') or 0) then
  return 0
end
local new = 0
for i = 2, #ARGV, 4 do
  local task_id, lane, min_version, task = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local group = group_key(task_id)
  if call('EXISTS', group) == 0 then
    local train = lane == 'train'
    local seq = call('HINCRBY', RUN, 'seq', 1)
    call('HSET', group, 'task', task, 'seq', seq, 'lane', lane, 'min_version', min_version,
      'size', train and run.group_size or 1, 'state', train and 'queued' or 'lane')
    if train then
      call('ZADD', key('queue'), seq, task_id)
      count('submitted', 1)
    else
      call('HSET', group, 'floor', min_version, 's0', 'q')
      call('ZADD', key('lane:' .. lane), seq, task_id)
      open_episode(task_id .. '#0', lane, tonumber(min_version), seq)
    end
    new = new + 1
  end
end
if cursor ~= '' then call('HSET', RUN, 'cursor', cursor) end
return new
