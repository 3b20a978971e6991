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

local function bytes_allow()
  local unconsumed = tonumber(call('HGET', RUN, 'unconsumed') or 0)
  if unconsumed <= run.max_bytes then return true end
  local shipped = (run.next_step - math.max(run.version, run.committed_step)) * run.groups_per_step
  return call('ZCARD', key('admitted')) + call('ZCARD', key('ready')) + shipped < run.groups_per_step
end

-- The oldest queued group that a worker at `version` may run; groups that ask for newer weights are passed over.
local function next_queued(version)
  local from = 0
  repeat
    local found = call('ZRANGE', key('queue'), from, from + 63)
    for _, task_id in ipairs(found) do
      if tonumber(call('HGET', group_key(task_id), 'min_version')) <= version then return task_id end
    end
    from = from + 64
  until #found < 64 or from >= 1024
  return nil
end

-- Admit one group for a worker at `version` and open all its episodes. Returns whether one was admitted.
local function admit(version)
  local floor = math.min(version, run.version)
  local due = floor + run.max_staleness
  if not bytes_allow() or not may_admit(due) then return false end
  local task_id = next_queued(version)
  if not task_id then return false end
  local group = group_key(task_id)
  local v = call('HMGET', group, 'seq', 'size')
  local seq = tonumber(v[1])
  call('ZREM', key('queue'), task_id)
  call('ZADD', key('admitted'), score(due, seq), task_id)
  call('HSET', group, 'state', 'admitted', 'floor', floor, 'due', due)
  for m = 0, tonumber(v[2]) - 1 do
    call('HSET', group, 's' .. m, 'q')
    open_episode(task_id .. '#' .. m, 'train', floor, seq)
  end
  return true
end
