-- The run: its limits, its steps, the queue's clock, and errors. KEYS[1] is the run's prefix, penstock:{RUN}:, a key
-- that never exists: Redis takes KEYS for written, and nobody but the owner may write the run's own hash.
local PREFIX = KEYS[1]
local RUN = PREFIX .. 'run'
local call = redis.call

local function key(name)
  return PREFIX .. name
end

local function refuse(code, text)
  return redis.error_reply(code .. ' ' .. text)
end

local raw = call('HMGET', RUN, 'group_size', 'groups_per_step', 'max_staleness', 'min_group', 'max_attempts',
  'lease_ttl_ms', 'max_bytes', 'max_groups', 'max_filtered_steps', 'overage', 'filter_groups', 'quotas')
if not raw[1] then
  return refuse('NORUN', 'no such run; create_run comes first')
end
local run = {
  group_size = tonumber(raw[1]), groups_per_step = tonumber(raw[2]), max_staleness = tonumber(raw[3]),
  min_group = tonumber(raw[4]), max_attempts = tonumber(raw[5]), lease_ttl_ms = tonumber(raw[6]),
  max_bytes = tonumber(raw[7]), max_groups = tonumber(raw[8]), max_filtered_steps = tonumber(raw[9]),
  overage = raw[10], filter_groups = raw[11],
}

-- Steps are a hash of their own, so that Redis can refuse it to everybody but the trainer.
local STEPS = key('steps')
do
  local names = {'version', 'next_step', 'committed_step'}
  for i, value in ipairs(call('HMGET', STEPS, unpack(names))) do run[names[i]] = tonumber(value or 0) end
end

-- data_source → groups; read only where it matters.
local function quota_of()
  return cjson.decode(raw[12])
end

-- Leases and heartbeats are measured by this clock alone: a client's clock may jump.
local function now_ms()
  local time = call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function count(field, by)
  if by ~= 0 then
    call('HINCRBY', key('counts'), field, by)
  end
end

-- Sorted-set scores hold a major number (due, floor, rank; below 2^20) and a minor one (submission order; below 2^32).
local SPAN = 4294967296
local function score(major, minor)
  return string.format('%.0f', major * SPAN + minor)
end

-- True once per nonce: a client that lost a reply asks again with the same one.
local function first_time(nonce)
  return call('SET', key('once:' .. nonce), 1, 'NX', 'EX', 600) and true or false
end
