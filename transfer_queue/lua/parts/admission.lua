-- Admission: arithmetic.py in Lua. `places`, `may_admit` and `may_ship` say there what they say here.
local function up_to(step)
  return '(' .. score(step + 1, 0)
end

-- Under `mask` a group that is late while it runs takes nobody's place.
local function count_unshipped(step)
  local low = '-inf'
  if run.overage == 'mask' then low = score(run.next_step, 0) end
  return call('ZCOUNT', key('admitted'), low, up_to(step)) + call('ZCOUNT', key('ready'), '-inf', up_to(step))
end

local function places(step)
  return math.max(0, step - run.next_step + 1) * run.groups_per_step
end

-- Steps after version + max_staleness need no look: no due lies there, and each adds places.
local function may_admit(due)
  for step = due, math.max(due, run.version + run.max_staleness) do
    if count_unshipped(step) >= places(step) then return false end
  end
  return true
end

-- Back-pressure. One step's worth of groups is always admitted: else a full queue could never ship, nor empty.
local function room_allows()
  local shipped = (run.next_step - math.max(run.version, run.committed_step)) * run.groups_per_step
  local in_system = call('ZCARD', key('admitted')) + call('ZCARD', key('ready')) + shipped
  if in_system < run.groups_per_step then return true end
  if run.max_groups > 0 and in_system >= run.max_groups then return false end
  return tonumber(call('HGET', key('counters'), 'unconsumed') or 0) <= run.max_bytes
end

-- First group of a queue that a worker at `version` may run, with its score; those that ask for newer weights are
-- passed over.
local function first_fit(queue, version)
  local from = 0
  repeat
    local found = call('ZRANGE', queue, from, from + 63, 'WITHSCORES')
    for i = 1, #found, 2 do
      local min_version = tonumber(call('HGET', group_key(found[i]), 'min_version'))
      if min_version <= version then return found[i], tonumber(found[i + 1]) end
    end
    from = from + 64
  until #found < 128 or from >= 1024
  return nil
end

local function next_queued(version)
  local best, best_score, best_queue
  for _, queue in ipairs(queue_keys(quota_of())) do
    local task_id, at = first_fit(queue, version)
    if task_id and (not best or at < best_score) then best, best_score, best_queue = task_id, at, queue end
  end
  return best, best_queue
end

-- Admit one group for a worker at `version` and open all its episodes. Returns whether one was admitted.
local function admit(version, now)
  local floor = math.min(version, run.version)
  local due = floor + run.max_staleness
  if not room_allows() or not may_admit(due) then return false end
  local task_id, queue = next_queued(version)
  if not task_id then return false end
  local group = group_key(task_id)
  local v = call('HMGET', group, 'seq', 'size', 'source', 'members_cost')
  local seq = tonumber(v[1])
  call('ZREM', queue, task_id)
  count_source(v[3], 1)
  add_bytes(tonumber(v[4]), 0)
  call('ZADD', key('admitted'), score(due, seq), task_id)
  call('HSET', group, 'state', 'admitted', 'floor', floor, 'due', due, 'at', now)
  for m = 0, tonumber(v[2]) - 1 do
    call('HSET', group, 's' .. m, 'q')
    open_episode(task_id .. '#' .. m, 'train', floor, seq)
  end
  return true
end
