-- The run and its data: creating it, submitting tasks, going back to a checkpoint, freeing payloads.

-- script: create_run
-- needs: server
-- ARGV: config, then limit name, value, … Returns nothing, or the first limit that differs: name, theirs, ours.
local RUN = KEYS[1] .. 'run'
local exists = redis.call('EXISTS', RUN) == 1
local layout = redis.call('HGET', RUN, 'layout') or '1'
if exists and layout ~= LAYOUT then return redis.error_reply('LAYOUT ' .. layout) end
for i = 2, #ARGV, 2 do
  local found = redis.call('HGET', RUN, ARGV[i])
  if exists and found ~= ARGV[i + 1] then
    return {ARGV[i], found or 'nothing', ARGV[i + 1]}
  end
end
for i = 2, #ARGV, 2 do redis.call('HSET', RUN, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', RUN, 'config', ARGV[1], 'layout', LAYOUT)
redis.call('HSETNX', KEYS[1] .. 'counters', 'server', server_start())
return {}

-- script: submit
-- needs: run, server, episode, queue
-- ARGV: epoch and index of the cursor ('' for none), epoch and index of the place before the tasks ('' for any), then
-- task id, split, min_version, priority, source, bytes that the task, and each of its episodes once it may run, count
-- for, packed task, … Returns how many tasks were new.
local epoch, index = tonumber(ARGV[1]), tonumber(ARGV[2])
if epoch then
  local known = call('HMGET', key('counters'), 'epoch', 'index')
  local known_epoch, known_index = tonumber(known[1] or 0), tonumber(known[2] or 0)
  if epoch < known_epoch or (epoch == known_epoch and index <= known_index) then return 0 end
  local after_epoch, after_index = tonumber(ARGV[3]), tonumber(ARGV[4])
  if after_epoch and (after_epoch > known_epoch or (after_epoch == known_epoch and after_index > known_index)) then
    return refuse('STEP', 'submit after ' .. after_epoch .. ':' .. after_index .. ': the tasks after ' .. known_epoch
      .. ':' .. known_index .. ' are not here')
  end
end
local quotas, now, new, train_tasks = quota_of(), now_ms(), 0, 0

local function add(task_id, split, min_version, priority, source, cost, member_cost, task)
  local group, train = group_key(task_id), split == 'train'
  local size, seq = train and run.group_size or 1, call('HINCRBY', key('counters'), 'seq', 1)
  call('SET', key('task:' .. task_id), task)
  call('HSET', group, 'seq', seq, 'split', split, 'source', source, 'priority', priority, 'min_version', min_version,
    'size', size, 'cost', cost, 'members_cost', size * member_cost, 'at', now, 'state', train and 'queued' or 'split')
  add_bytes(train and cost or cost + member_cost, 0)
  if train then
    call('ZADD', queue_key(source, quotas), queue_score(priority, seq), task_id)
    train_tasks = train_tasks + 1
  else
    call('HSET', group, 'floor', min_version, 's0', 'q')
    call('ZADD', key('split:' .. split), seq, task_id)
    open_episode(task_id .. '#0', split, tonumber(min_version), seq)
  end
end

for i = 5, #ARGV, 8 do
  local task_id = ARGV[i]
  -- A queue that lost its last second in a machine crash may receive a task again that is already trained.
  if call('EXISTS', group_key(task_id)) == 0 and call('SREM', key('trained_ahead'), task_id) == 0 then
    add(task_id, ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), ARGV[i + 4], tonumber(ARGV[i + 5]),
      tonumber(ARGV[i + 6]), ARGV[i + 7])
    new = new + 1
  end
end
count('submitted', train_tasks)
if epoch then call('HSET', key('counters'), 'epoch', epoch, 'index', index) end
return new

-- script: rewind
-- needs: run
-- ARGV: step. Returns how many fixed steps will be handed out again. Nothing changes: they were kept as recorded.
local step = tonumber(ARGV[1])
if step < run.committed_step or step > run.next_step then
  return refuse('STEP', 'rewind to ' .. step .. ': batches from ' .. run.committed_step .. ' to ' .. run.next_step
    .. ' are kept')
end
return run.next_step - step

-- script: locate
-- needs: run, server, episode
-- ARGV: episodes. Returns for each {name of its payload, bytes}; bytes −1: in the batch log; 0: nowhere.
local rows = {}
for i, episode in ipairs(ARGV) do
  local task_id, m = split_episode(episode)
  rows[i] = {'', 0}
  if task_id then
    local v = call('HMGET', group_key(task_id), 'f' .. m, 'b' .. m, 'p' .. m)
    if v[2] then rows[i] = {payload_name(episode, v[1]), tonumber(v[2])} end
    if v[3] then rows[i] = {episode, -1} end
  end
end
return rows

-- script: sweep
-- needs: run
-- KEYS: the run, then keys of payloads. ARGV: row of `garbage`, how many of the keys are its payload's, …
-- Deletes what is still garbage: a Redis that lost its newest writes with its machine may need it again.
local at = 2
for i = 1, #ARGV, 2 do
  local count = tonumber(ARGV[i + 1])
  if call('SREM', key('garbage'), ARGV[i]) == 1 then
    for k = at, at + count - 1 do call('UNLINK', KEYS[k]) end
  end
  at = at + count
end
return 1
