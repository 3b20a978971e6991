-- needs: run, server, episode, queue, group
-- ARGV: episode. Its group is queued again as it was submitted.
local episode = ARGV[1]
if not call('ZSCORE', key('letters'), episode) then
  return refuse('QUEUE', episode .. ': no such dead letter')
end
local task_id = split_episode(episode)
local group = group_key(task_id)
local v = fields_of(group)
if v.state ~= 'dead' and v.state ~= 'done' then
  return refuse('QUEUE', episode .. ': its group went on without it; there is nothing to queue again')
end
local task = call('GET', key('task:' .. task_id))
for m = 0, tonumber(v.size) - 1 do drop_letter(task_id .. '#' .. m) end
forget_group(task_id)
call('SET', key('task:' .. task_id), task)
call('HSET', group, 'seq', v.seq, 'split', v.split, 'source', v.source, 'priority', v.priority, 'min_version',
  v.min_version, 'size', v.size, 'cost', v.cost, 'members_cost', v.members_cost, 'at', now_ms())
add_bytes(tonumber(v.cost) + (v.split == 'train' and 0 or tonumber(v.members_cost)), 0)
if v.split == 'train' then
  call('HSET', group, 'state', 'queued')
  call('ZADD', queue_key(v.source, quota_of()), queue_score(tonumber(v.priority), tonumber(v.seq)), task_id)
  count('dead_groups', -1)
else
  call('HSET', group, 'state', 'split', 'floor', v.min_version, 's0', 'q')
  count_split(v.split, 'done', -1)
  open_episode(episode, v.split, tonumber(v.min_version), tonumber(v.seq))
end
return 1
