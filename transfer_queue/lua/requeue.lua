-- needs: run, episode, group
-- ARGV: episode. Its group is queued again as it was submitted.
local episode = ARGV[1]
if not call('ZSCORE', key('letters'), episode) then
  return refuse('LEDGER', episode .. ': no such dead letter')
end
local task_id = split(episode)
local group = group_key(task_id)
local v = fields_of(group)
if v.state ~= 'dead' and v.state ~= 'done' then
  return refuse('LEDGER', episode .. ': its group went on without it; there is nothing to queue again')
end
for m = 0, tonumber(v.size) - 1 do drop_letter(task_id .. '#' .. m) end
forget_group(task_id)
call('HSET', group, 'task', v.task, 'seq', v.seq, 'lane', v.lane, 'min_version', v.min_version, 'size', v.size)
if v.lane == 'train' then
  call('HSET', group, 'state', 'queued')
  call('ZADD', key('queue'), v.seq, task_id)
  count('dead_groups', -1)
else
  call('HSET', group, 'state', 'lane', 'floor', v.min_version, 's0', 'q')
  count_lane(v.lane, 'done', -1)
  open_episode(episode, v.lane, tonumber(v.min_version), tonumber(v.seq))
end
return 1
