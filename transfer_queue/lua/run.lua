-- The run and its data: creating it, submitting tasks, going back to a checkpoint, freeing payloads.

-- script: create_run
-- needs: base, server
-- ARGV: config, id ('' for none), hash of the configuration, model, then limit name, value, … Returns nothing where the
-- run was made; {'limit', name, theirs, ours}, the first that differs; {'taken' or 'found', id, hash, model, age in ms}.
local config, id, hash, model = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local found = call('HMGET', RUN, 'config', 'layout', 'id', 'hash', 'model', 'created')

local function is_another()
  local theirs = found[3] or ''
  if id == '' or theirs == '' then return found[1] ~= config end
  return theirs ~= id or found[5] ~= model
end

local function describe_run(how)
  return {how, found[3] or '', found[4] or '', found[5] or '', server_ms() - tonumber(found[6] or server_ms())}
end

if found[1] then
  if found[2] ~= LAYOUT then return refuse('LAYOUT', found[2] or '1') end
  if is_another() then return describe_run('taken') end
  for i = 5, #ARGV, 2 do
    local limit = call('HGET', RUN, ARGV[i]) or (ARGV[i] == 'branches' and '0')  -- of a run from before there were any
    if limit ~= ARGV[i + 1] then return {'limit', ARGV[i], limit or 'nothing', ARGV[i + 1]} end
  end
end
for i = 5, #ARGV, 2 do call('HSET', RUN, ARGV[i], ARGV[i + 1]) end
call('HSET', RUN, 'config', config, 'layout', LAYOUT)
if id ~= '' then call('HSET', RUN, 'id', id, 'hash', hash, 'model', model) end
call('HSETNX', RUN, 'created', server_ms())
call('HSETNX', key('counters'), 'server', server_start())
return found[1] and describe_run('found') or {}

-- script: claim_head
-- needs: base, full, clock
-- ARGV: holder, time to live in ms, a holder that is known to be dead ('' for none). Returns nothing where the holder
-- owns the run, else the one that does and the ms that it has left.
local head, now = call('HMGET', key('head'), 'holder', 'until'), now_ms()
if head[1] and head[1] ~= ARGV[1] and head[1] ~= ARGV[3] and tonumber(head[2]) > now then
  return {head[1], tonumber(head[2]) - now}
end
call('HSET', key('head'), 'holder', ARGV[1], 'until', now + tonumber(ARGV[2]))
return {}

-- script: release_head
-- needs: base
-- ARGV: holder.
if call('HGET', key('head'), 'holder') == ARGV[1] then call('DEL', key('head')) end

-- script: submit
-- needs: run, clock, server, episode, queue
-- ARGV: epoch and index of the cursor ('' for none), epoch and index of the place before the tasks ('' for any), then
-- task id, split, min_version, priority, source, episodes of the group ('' for the run's), bytes that the task, and each
-- of its episodes once it may run, count for, packed task, … Returns how many tasks were new.
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

local function add(task_id, split, min_version, priority, source, members, cost, member_cost, task)
  local group, train = group_key(task_id), split == 'train'
  local size, seq = train and (members or run.group_size) or 1, call('HINCRBY', key('counters'), 'seq', 1)
  call('SET', key('task:' .. task_id), task)
  call('HSET', group, 'seq', seq, 'split', split, 'source', source, 'priority', priority, 'min_version', min_version,
    'size', size, 'cost', cost, 'members_cost', size * member_cost, 'at', now, 'state', train and 'queued' or 'split')
  add_bytes(train and cost or cost + member_cost, 0)
  if train then
    call('ZADD', queue_key(source, quotas), queue_score(priority, seq), task_id)
    count('queued_episodes', size)
    train_tasks = train_tasks + 1
  else
    call('HSET', group, 'floor', min_version, 's0', 'q')
    call('ZADD', key('split:' .. split), seq, task_id)
    open_episode(task_id .. '#0', split, tonumber(min_version), seq)
  end
end

-- A queue that lost its last second in a machine crash may receive a task again that is already trained. Those are taken
-- out last: after a removal a full Redis 6.2 would let the script add tasks.
local trained = {}
for i = 5, #ARGV, 9 do
  local task_id = ARGV[i]
  if call('SISMEMBER', key('trained_ahead'), task_id) == 1 then
    trained[#trained + 1] = task_id
  elseif call('EXISTS', group_key(task_id)) == 0 then
    add(task_id, ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), ARGV[i + 4], tonumber(ARGV[i + 5]),
      tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7]), ARGV[i + 8])
    new = new + 1
  end
end
count('submitted', train_tasks)
for _, task_id in ipairs(trained) do call('SREM', key('trained_ahead'), task_id) end
if epoch then call('HSET', key('counters'), 'epoch', epoch, 'index', index) end
return new

-- script: rewind
-- needs: run
-- flags: no-writes
-- ARGV: step. Returns how many fixed steps will be handed out again. Nothing changes: they were kept as recorded.
local step = tonumber(ARGV[1])
if step < run.committing or step > run.next_step then
  return refuse('STEP', 'rewind to ' .. step .. ': batches from ' .. run.committing .. ' to ' .. run.next_step
    .. ' are kept')
end
return run.next_step - step

-- script: locate
-- needs: run, server, episode
-- flags: no-writes
-- ARGV: episodes. Returns for each {name of its payload, bytes}; bytes −1: in the archive,
-- under the step that is its name; 0: nowhere.
local rows = {}
for i, episode in ipairs(ARGV) do
  local task_id, m = split_episode(episode)
  rows[i] = {'', 0}
  if task_id then
    local v = call('HMGET', group_key(task_id), 'f' .. m, 'b' .. m, 'p' .. m, 'y' .. m, 'step')
    if v[2] then rows[i] = {payload_name(episode, v[1], v[4]), tonumber(v[2])} end
    if v[3] then rows[i] = {v[5], -1} end
  end
end
return rows

-- script: reserve
-- needs: run, clock
-- ARGV: rows of `garbage`, of payloads that a writer stores next on other servers. `complete` takes them out again.
local reserved = {}
for i, row in ipairs(ARGV) do
  reserved[2 * i - 1], reserved[2 * i] = now_ms(), row
end
call('ZADD', key('reserved'), unpack(reserved))

-- script: release_reserved
-- needs: run, clock
-- ARGV: milliseconds. Names in `garbage` what was reserved so long ago and never acknowledged: its writer is dead.
local rows = call('ZRANGEBYSCORE', key('reserved'), '-inf', now_ms() - tonumber(ARGV[1]))
in_pieces(rows, function(...)
  call('SADD', key('garbage'), ...)
  call('ZREM', key('reserved'), ...)
end)

-- script: sweep
-- needs: run
-- flags: allow-oom
-- KEYS: the run, then keys of payloads. ARGV: row of `garbage`, how many of the keys are its payload's, …
-- Deletes what is still garbage: a Redis that lost its newest writes with its machine may need it again.
local asked, rows, keys, at = {}, {}, {}, 2
for i = 1, #ARGV, 2 do asked[#asked + 1] = ARGV[i] end
for i, is_garbage in ipairs(call('SMISMEMBER', key('garbage'), unpack(asked))) do
  local count = tonumber(ARGV[2 * i])
  if is_garbage == 1 then
    rows[#rows + 1] = asked[i]
    for k = at, at + count - 1 do keys[#keys + 1] = KEYS[k] end
  end
  at = at + count
end
in_pieces(rows, function(...) call('SREM', key('garbage'), ...) end)
in_pieces(keys, function(...) call('UNLINK', ...) end)
