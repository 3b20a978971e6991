-- needs: run, full, episode, queue, group, steps
-- ARGV: step, packed map step → groups of steps that the checkpoint holds ('' for none). Everything of the steps below
-- `step` is deleted; their payloads are named in `garbage` for a client to sweep.
local step = tonumber(ARGV[1])
local known = ARGV[2] ~= '' and cmsgpack.unpack(ARGV[2]) or {}
for lost = run.next_step, step - 1 do
  if not known[lost] then
    return refuse('STEP', 'commit of ' .. step .. ': step ' .. lost .. ' was never leased here; steps below '
      .. run.next_step .. ' were')
  end
end

local function forget_fixed(groups)
  for _, group in ipairs(groups) do forget_group((split(group[1])), true) end
end

-- A step that this ledger lost and a checkpoint holds: its groups are forgotten wherever they are. One that is not even
-- submitted here is remembered until it is.
local function forget_trained(groups)
  local quotas = quota_of()
  for _, group in ipairs(groups) do
    local task_id = split(group[1])
    local source, state = unpack(call('HMGET', group_key(task_id), 'source', 'state'))
    if not state then
      call('SADD', key('trained_ahead'), task_id)
      count('submitted', 1)
      count('completed', #group)
    else
      for _, episode in ipairs(group) do
        local _, m = split(episode)
        if call('HGET', group_key(task_id), 's' .. m) ~= 'd' then count('completed', 1) end
      end
      for _, set in ipairs({queue_key(source, quotas), key('admitted'), key('ready')}) do
        call('ZREM', set, task_id)
      end
      if state == 'admitted' or state == 'ready' then count_source(source, -1) end
      if state == 'dead' then count('dead_groups', -1) end
      forget_group(task_id)
    end
    count('trained', #group)
  end
end

for done = run.committed_step, step - 1 do
  local groups = step_groups(done)
  if done >= run.next_step then
    groups = known[done]
    forget_trained(groups)
  elseif done >= run.version then
    count_trained(groups)
    forget_fixed(groups)
  else
    forget_fixed(groups)
  end
  for _, group in ipairs(groups) do count('committed', #group) end
  count('committed_groups', #groups)
  call('HDEL', STEPS, 'batch:' .. done)
end
if step > run.next_step then
  call('HSET', STEPS, 'next_step', step, 'version', step)
  call('HDEL', STEPS, 'announcement')
end
call('HSET', STEPS, 'committed_step', math.max(step, run.committed_step))
return 1
