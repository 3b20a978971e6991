-- needs: run, trainer, server, episode, queue, group, lengths, admission
-- ARGV: step. Returns {1, packed groups} or {0, cause}.
local step = tonumber(ARGV[1])
local fixed = call('HGET', STEPS, 'batch:' .. step)
if fixed then return {1, fixed} end
if step ~= run.next_step then
  return refuse('STEP', 'step ' .. step .. ': the next one is ' .. run.next_step .. '; steps below '
    .. run.committed_step .. ' are committed')
end
if step > run.version + 1 then
  return {0, 'version ' .. (step - 1) .. ' is not published yet; only one step ahead is leased'}
end

-- Members that have not ended count with what they have journaled.
local function drop_group(task_id)
  local v = forget_group(task_id)
  count_source(v.source, -1)
  count('dropped_over_age', 1)
  for m = 0, tonumber(v.size) - 1 do
    local state, tokens = v['s' .. m], tonumber(v['t' .. m] or 0)
    if v['b' .. m] then count('dropped', 1) end  -- others without a reward were counted when their group was ready
    if state ~= 'd' and state ~= 'x' then count_length(tokens, false) end
    if state ~= 'x' then count_length(tokens, true) end
  end
end

local function drop_over_age()
  for _, set in ipairs({'admitted', 'ready'}) do
    for _, task_id in ipairs(call('ZRANGEBYSCORE', key(set), '-inf', '(' .. score(step, 0))) do
      drop_group(task_id)
      call('ZREM', key(set), task_id)
    end
  end
end

-- Where no group that is due then still runs there is nothing to wait for. (That too many are due at once happens only
-- to a queue that has caught up with a checkpoint that was ahead of it.)
local function left_in_time(batch)
  for at = step, math.max(step, run.version + run.max_staleness) do
    local slow = call('ZCOUNT', key('admitted'), '-inf', up_to(at))
    local left = slow + call('ZCOUNT', key('ready'), '-inf', up_to(at))
    for _, one in ipairs(batch) do
      if one.due <= at then left = left - 1 end
    end
    if slow > 0 and left > (at - step) * run.groups_per_step then return false end
  end
  return true
end

local function slow_names()
  local names = {}
  for _, task_id in ipairs(call('ZRANGE', key('admitted'), 0, 4)) do
    names[#names + 1] = task_id .. ' by step ' .. call('HGET', group_key(task_id), 'due')
  end
  return table.concat(names, ', ')
end

local function ship(task_id)
  local v, episodes = fields_of(group_key(task_id)), {}
  for m = 0, tonumber(v.size) - 1 do
    if v['r' .. m] then
      episodes[#episodes + 1] = task_id .. '#' .. m
      if tonumber(v['v' .. m] or step) + run.max_staleness < step then
        count('masked', 1)
        count_length(tonumber(v['t' .. m]), true)
      end
    end
  end
  call('ZREM', key('ready'), task_id)
  call('HSET', group_key(task_id), 'state', 'shipped', 'step', step)
  count_source(v.source, -1)
  return episodes
end

-- Under `wait` a group is over the bound only where a queue has caught up with a checkpoint that was ahead of it.
if run.overage ~= 'mask' then drop_over_age() end
local filtered = tonumber(call('HGET', key('counters'), 'filtered_since') or 0)
if run.max_filtered_steps > 0 and filtered > run.max_filtered_steps * run.groups_per_step then
  return refuse('FILTERED', 'step ' .. step .. ': ' .. filtered .. ' groups had equal rewards and were filtered, more than '
    .. run.max_filtered_steps .. ' steps of ' .. run.groups_per_step .. ' (max_filtered_steps). The tasks are too easy'
    .. ' or too hard for this policy, or the reward function gives one answer to all')
end
local batch = {}
for _, task_id in ipairs(call('ZRANGE', key('ready'), 0, run.groups_per_step - 1)) do
  local v = call('HMGET', group_key(task_id), 'due', 'seq')
  batch[#batch + 1] = {task_id = task_id, due = tonumber(v[1]), seq = tonumber(v[2])}
end
if #batch < run.groups_per_step then
  return {0, #batch .. ' of ' .. run.groups_per_step .. ' groups ready; ' .. call('ZCARD', key('admitted'))
    .. ' in flight, ' .. count_queued(quota_of()) .. ' queued'}
end
if run.overage == 'wait' and not left_in_time(batch) then
  return {0, 'slow groups are due: ' .. slow_names()}
end

table.sort(batch, function(a, b) return a.seq < b.seq end)
local groups = {}
for i, one in ipairs(batch) do groups[i] = ship(one.task_id) end
local packed = cmsgpack.pack(groups)
call('HSET', STEPS, 'batch:' .. step, packed, 'next_step', step + 1)
call('HDEL', key('counters'), 'filtered_since')
return {1, packed}
