-- Queued groups: one sorted set for all sources without a quota, one for each source with one. Highest priority first,
-- then oldest.
local HIGHEST_PRIORITY = 1000

local function queue_key(source, quotas)
  return quotas[source] and key('queue:' .. source) or key('queue')
end

local function queue_score(priority, seq)
  return score(HIGHEST_PRIORITY - priority, seq)
end

-- Keys of the queues that may be admitted from; `all` also gives those whose quota is used up.
local function queue_keys(quotas, all)
  local keys = {key('queue')}
  for source, quota in pairs(quotas) do
    local used = all and 0 or tonumber(call('HGET', key('in_system'), source) or 0)
    if used < quota then keys[#keys + 1] = key('queue:' .. source) end
  end
  table.sort(keys)
  return keys
end

local function count_queued(quotas)
  local queued = 0
  for _, queue in ipairs(queue_keys(quotas, true)) do queued = queued + call('ZCARD', queue) end
  return queued
end

-- Queued groups beyond what the quota of their source has room for.
local function count_parked(quotas)
  local parked = 0
  for source, quota in pairs(quotas) do
    local room = math.max(0, quota - tonumber(call('HGET', key('in_system'), source) or 0))
    parked = parked + math.max(0, call('ZCARD', key('queue:' .. source)) - room)
  end
  return parked
end

-- Unshipped groups of sources with a quota.
local function count_source(source, by)
  if quota_of()[source] then call('HINCRBY', key('in_system'), source, by) end
end
