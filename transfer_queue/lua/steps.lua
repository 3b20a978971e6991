-- Batches of steps, versions, spilling and commits.

-- script: claim_training
-- needs: run, trainer, server, episode
-- ARGV: holder, nonce. Returns the trainer's new epoch: a fence, so that it is above every one that was ever given out.
if call('HGET', STEPS, 'claimed_by') ~= ARGV[2] then
  call('HSET', STEPS, 'epoch', new_fence(), 'trainer', ARGV[1], 'claimed_by', ARGV[2])
end
return tonumber(call('HGET', STEPS, 'epoch'))

-- script: check_training
-- needs: run, trainer, fenced

-- script: lease_batch
-- needs: run, trainer, fenced, clock, server, episode, queue, group, lengths, admission
-- ARGV: step. Returns {1, packed groups} or {0, cause}.
local step = tonumber(ARGV[1])
local fixed = step >= run.committing and call('HGET', STEPS, 'batch:' .. step)
if fixed then return {1, fixed} end
if step ~= run.next_step or step < run.committing then
  return refuse('STEP', 'step ' .. step .. ': the next one is ' .. math.max(run.next_step, run.committing)
    .. '; steps below ' .. run.committing .. ' are committed')
end
if step > run.version + 1 then
  return {0, 'version ' .. (step - 1) .. ' is not published yet; only one step ahead is leased'}
end

-- Unfinished members count with the tokens journaled so far.
local function drop_group(task_id)
  local v = forget_group(task_id)
  count_source(v.source, -1)
  count('dropped_over_age', 1)
  local rows = {}
  for m = 0, tonumber(v.size) - 1 do
    local state, tokens = v['s' .. m], tonumber(v['t' .. m] or 0)
    if v['b' .. m] or (state ~= 'd' and state ~= 'x') then add_row(rows, v, task_id .. '#' .. m, m) end
    if v['b' .. m] then count('dropped', 1) end  -- others without a reward were counted when their group was ready
    if state ~= 'd' and state ~= 'x' then count_length(tokens, false) end
    if state ~= 'x' then count_length(tokens, true) end
  end
  book_fate('over_age', rows)
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

local function ship(one)
  local fields, episodes = {}, {}
  for m = 0, one.size - 1 do
    for _, name in ipairs({'r', 'v', 't'}) do fields[#fields + 1] = name .. m end
  end
  local v = call('HMGET', group_key(one.task_id), unpack(fields))
  for m = 0, one.size - 1 do
    local rewarded, lowest, tokens = unpack(v, 3 * m + 1, 3 * m + 3)
    if rewarded then
      episodes[#episodes + 1] = one.task_id .. '#' .. m
      if tonumber(lowest or step) + run.max_staleness < step then
        count('masked', 1)
        count_length(tonumber(tokens), true)
      end
    end
  end
  call('ZREM', key('ready'), one.task_id)
  call('HSET', group_key(one.task_id), 'state', 'shipped', 'step', step)
  count_source(one.source, -1)
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
  local v = call('HMGET', group_key(task_id), 'due', 'seq', 'size', 'source')
  batch[#batch + 1] = {
    task_id = task_id, due = tonumber(v[1]), seq = tonumber(v[2]), size = tonumber(v[3]), source = v[4],
  }
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
for i, one in ipairs(batch) do groups[i] = ship(one) end
local packed = cmsgpack.pack(groups)
call('HSET', STEPS, 'batch:' .. step, packed, 'next_step', step + 1)
call('HDEL', key('counters'), 'filtered_since')
return {1, packed}

-- script: drop_lost
-- needs: run, trainer, fenced, server, episode, queue, group
-- ARGV: step, episodes whose payload is gone. They leave the step, with groups that keep too few members. Returns how
-- many episodes left.
local step = tonumber(ARGV[1])
local fixed = step >= run.committing and call('HGET', STEPS, 'batch:' .. step)
if not fixed then
  return refuse('STEP', 'lost payloads of step ' .. step .. ': fixed steps are ' .. run.committing .. ' to '
    .. (run.next_step - 1))
end
local gone = {}
for i = 2, #ARGV do gone[ARGV[i]] = true end

local function without_gone(group)
  local left = {}
  for _, episode in ipairs(group) do
    if not gone[episode] then left[#left + 1] = episode end
  end
  return left
end

local kept, changed, lost, rows = {}, {}, 0, {}
for _, group in ipairs(cmsgpack.unpack(fixed)) do
  local task_id, left = split_episode(group[1]), without_gone(group)
  local v = fields_of(group_key(task_id))
  local enough = #left == #group or #left >= math.min(run.min_group, tonumber(v.size))
  if enough then kept[#kept + 1] = left else left = {} end
  if #left < #group then changed[#changed + 1] = {task_id = task_id, v = v, group = group, whole = not enough} end
  for _, episode in ipairs(group) do
    if not enough or gone[episode] then add_row(rows, v, episode, select(2, split_episode(episode))) end
  end
  lost = lost + #group - #left
end
book_fate('payload_lost', rows)

local function forget_payload(one, episode)
  local _, m = split_episode(episode)
  local group = group_key(one.task_id)
  if one.v['b' .. m] then free_payload(one.v, group, episode, m, step < run.version) end
  call('HDEL', group, 'p' .. m)
end

for _, one in ipairs(changed) do
  if one.whole then
    forget_group(one.task_id, step < run.version)
    count('payload_lost_groups', 1)
    call('HINCRBY', STEPS, 'lost:' .. step, 1)
  else
    for _, episode in ipairs(one.group) do
      if gone[episode] then forget_payload(one, episode) end
    end
  end
end
count('payload_lost', lost)
-- Its publication counted them as trained; the account would have them in two places.
if step < math.max(run.version, run.trained_below) then count('trained', -lost) end
call('HSET', STEPS, 'batch:' .. step, cmsgpack.pack(kept))
return lost

-- script: pass_step
-- needs: run, trainer, fenced
-- ARGV: step. Fixes the step of the current version as one without groups. Returns 1 if it is such a step, else 0.
local step = tonumber(ARGV[1])
if step ~= run.version then return 0 end
if step ~= run.next_step then
  local batch = call('HGET', STEPS, 'batch:' .. step)
  return batch and #cmsgpack.unpack(batch) == 0 and 1 or 0
end
call('HSET', STEPS, 'batch:' .. step, cmsgpack.pack({}), 'lost:' .. step, run.groups_per_step, 'next_step', step + 1)
call('HINCRBY', key('counts'), 'payload_lost_groups', 0)  -- `status` looks for steps with fewer groups where this is there
return 1

-- script: publish_version
-- needs: run, trainer, fenced, server, episode, steps
-- ARGV: version, packed announcement, its packed mark, nonce. Returns 1 if it became current, 0 if it was published
-- before.
local version, nonce = tonumber(ARGV[1]), ARGV[4]
if version <= run.version then
  return call('HGET', STEPS, 'published_by') == nonce and 1 or 0
end
if version ~= run.version + 1 or version > run.next_step then
  return refuse('STEP', 'version ' .. version .. ' after ' .. run.version .. ': step ' .. (version - 1)
    .. ' is out of order or was never leased')
end
count_step_trained(version - 1, step_groups(version - 1))
call('HSET', STEPS, 'version', version, 'announcement', ARGV[2], 'announced', ARGV[3], 'published_by', nonce)
return 1

-- script: renew_manifest
-- needs: run, trainer, fenced
-- ARGV: version, packed announcement, its packed mark. Returns 1 if `version` is the current one.
if tonumber(ARGV[1]) ~= run.version then return 0 end
call('HSET', STEPS, 'announcement', ARGV[2], 'announced', ARGV[3])
return 1

-- script: spill
-- needs: run, trainer, fenced, server, episode, queue, group
-- ARGV: step, episodes of it that are durable in the archive. Their payloads are named in `garbage`. Returns how many
-- were still held here.
local step, moved = tonumber(ARGV[1]), 0
if step >= run.version then
  return refuse('STEP', 'spill of step ' .. step .. ': version ' .. (step + 1) .. ' is not published')
end
for i = 2, #ARGV do
  local task_id, m = split_episode(ARGV[i])
  local group = group_key(task_id)
  local v = fields_of(group)
  if v.state == 'shipped' and tonumber(v.step) == step and v['b' .. m] then
    free_payload(v, group, ARGV[i], m, true)
    call('HSET', group, 'p' .. m, 1)
    moved = moved + 1
  end
end
count('spilled', moved)
return moved

-- script: commit
-- needs: run, trainer, fenced
-- ARGV: step, packed map step → groups of steps that the checkpoint holds ('' for none). The steps below `step` are
-- committed from now on; `forget_committed` then deletes what they hold. Batches that are not known here are kept for it.
local step = tonumber(ARGV[1])
local known = ARGV[2] ~= '' and cmsgpack.unpack(ARGV[2]) or {}
-- Those of a commit that was cut off are kept already; a later life need not name them again.
local first = math.max(run.next_step, run.committing)
for lost = first, step - 1 do
  if not known[lost] then
    return refuse('STEP', 'commit of ' .. step .. ': step ' .. lost .. ' was never leased here; steps below '
      .. first .. ' were')
  end
end
for lost = first, step - 1 do call('HSET', STEPS, 'ahead:' .. lost, cmsgpack.pack(known[lost])) end
if step > run.committing then call('HSET', STEPS, 'committing', step) end
if ARGV[2] ~= '' and step > run.version then call('HSET', STEPS, 'caught_up', step) end

-- script: forget_committed
-- needs: run, trainer, fenced, server, episode, queue, group, steps
-- ARGV: how many episodes at most, whole groups. Deletes what committed steps hold, oldest first; payloads are named in
-- `garbage` for a client to sweep. Returns 1 while something is left. A client that dies between two calls leaves a
-- queue whose accounts balance, and the next commit continues here.
local budget = tonumber(ARGV[1])

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

-- A group of a step that this queue lost and a checkpoint holds is forgotten wherever it is. One that is not even
-- submitted here is remembered until it is.
local function forget_trained(group)
  local task_id = split_episode(group[1])
  local v, rows = fields_of(group_key(task_id)), {}
  for _, episode in ipairs(group) do add_row(rows, v, episode, select(2, split_episode(episode))) end
  book_fate('trained', rows)
  count('trained', #group)
  count('committed', #group)
  count('committed_groups', 1)
  if not v.state then
    call('SADD', key('trained_ahead'), task_id)
    count('submitted', 1)
    count('completed', #group)
    return
  end
  settle_members(v, group)
  for _, set in ipairs({queue_key(v.source, quota_of()), key('admitted'), key('ready')}) do call('ZREM', set, task_id) end
  if v.state == 'queued' then count('queued_episodes', -tonumber(v.size)) end
  if v.state == 'admitted' or v.state == 'ready' then count_source(v.source, -1) end
  if v.state == 'dead' then count('dead_groups', -1) end
  forget_group(task_id)
end

-- The groups of a fixed step count as committed when all of them are forgotten: until then the step is in the accounts.
local function end_fixed(groups)
  for _, group in ipairs(groups) do count('committed', #group) end
  count('committed_groups', #groups)
end

local function end_step(step)
  call('HDEL', STEPS, 'batch:' .. step, 'ahead:' .. step, 'lost:' .. step, 'forgotten')
  run.committed_step, run.next_step = step + 1, math.max(step + 1, run.next_step)
  call('HSET', STEPS, 'committed_step', run.committed_step, 'next_step', run.next_step)
end

local function forget_some(step)
  local lost, at = step >= run.next_step, tonumber(call('HGET', STEPS, 'forgotten') or 0)
  local groups = lost and cmsgpack.unpack(call('HGET', STEPS, 'ahead:' .. step)) or step_groups(step)
  if not lost and at == 0 then count_step_trained(step, groups) end
  while at < #groups and budget > 0 do
    at = at + 1
    budget = budget - #groups[at]
    if lost then forget_trained(groups[at]) else forget_group((split_episode(groups[at][1])), true) end
  end
  if at < #groups then
    call('HSET', STEPS, 'forgotten', at)
    return
  end
  if not lost then end_fixed(groups) end
  end_step(step)
end

while run.committed_step < run.committing and budget > 0 do forget_some(run.committed_step) end
if run.committed_step < run.committing then return 1 end
local caught_up = tonumber(call('HGET', STEPS, 'caught_up') or 0)
if caught_up > run.version then
  call('HSET', STEPS, 'next_step', math.max(caught_up, run.next_step), 'version', caught_up)
  call('HDEL', STEPS, 'announcement', 'announced')
end
call('HDEL', STEPS, 'caught_up')
return 0

-- script: held
-- needs: run, server, episode, queue, group
-- flags: no-writes
-- Finished training episodes that are still here: in unfinished and ready groups, and in steps not yet committed.
local names = {}
for _, set in ipairs({'admitted', 'ready'}) do
  for _, task_id in ipairs(call('ZRANGE', key(set), 0, -1)) do
    local v = fields_of(group_key(task_id))
    for m = 0, tonumber(v.size) - 1 do
      if v['b' .. m] then names[#names + 1] = task_id .. '#' .. m end
    end
  end
end
for step = run.committed_step, run.next_step - 1 do
  for _, group in ipairs(cmsgpack.unpack(call('HGET', STEPS, 'batch:' .. step))) do
    for _, episode in ipairs(group) do names[#names + 1] = episode end
  end
end
return names
