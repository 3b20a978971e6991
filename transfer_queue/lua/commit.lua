-- needs: run, trainer, server, episode, queue, group, steps
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
  for _, group in ipairs(groups) do forget_group((split_episode(group[1])), true) end
end

-- What had finished here and is not in the checkpoint finished without being trained; what is in it had finished.
local function settle_members(v, group)
  local finished = 0
  for m = 0, tonumber(v.size) - 1 do
    if v['b' .. m] then finished = finished + 1 end
  end
  for _, episode in ipairs(group) do
    local _, m = split_episode(episode)
    if v['b' .. m] then finished = finished - 1 else count('completed', 1) end
  end
  count('unrewarded', finished)
end

-- A step that this queue lost and a checkpoint holds: its groups are forgotten wherever they are. One that is not even
-- submitted here is remembered until it is.
local function forget_trained(group)
  local task_id = split_episode(group[1])
  local v = fields_of(group_key(task_id))
  count('trained', #group)
  if not v.state then
    call('SADD', key('trained_ahead'), task_id)
    count('submitted', 1)
    count('completed', #group)
    return
  end
  settle_members(v, group)
  for _, set in ipairs({queue_key(v.source, quota_of()), key('admitted'), key('ready')}) do call('ZREM', set, task_id) end
  if v.state == 'admitted' or v.state == 'ready' then count_source(v.source, -1) end
  if v.state == 'dead' then count('dead_groups', -1) end
  forget_group(task_id)
end

for done = run.committed_step, step - 1 do
  local groups = step_groups(done)
  if done >= run.next_step then
    groups = known[done]
    for _, group in ipairs(groups) do forget_trained(group) end
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
if ARGV[2] ~= '' and step > run.version then
  call('HSET', STEPS, 'next_step', math.max(step, run.next_step), 'version', step)
  call('HDEL', STEPS, 'announcement')
end
call('HSET', STEPS, 'committed_step', math.max(step, run.committed_step))
return 1
