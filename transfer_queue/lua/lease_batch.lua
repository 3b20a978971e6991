-- ARGV: step. Returns {1, {group: {rewarded members}} …} | {0, cause} | {-1, error}.
local step = tonumber(ARGV[1])
local key = P .. ':step:' .. step
local function composition()
  local groups = {}
  for _, group in ipairs(redis.call('LRANGE', key, 0, -1)) do
    local names = {}
    for _, name in ipairs(members(group)) do
      local e = fields(episode_key(name))
      if e.state == 'completed' and e.rewarded == '1' then names[#names + 1] = name .. '\0' .. e.fence end
    end
    groups[#groups + 1] = names
  end
  return {1, groups}
end
if redis.call('EXISTS', key) == 1 then return composition() end

local next_step, current, per_step = metan('next_step'), metan('version'), metan('groups_per_step')
if step ~= next_step then return {-1, 'step ' .. step .. ' is not the next one, which is ' .. next_step} end
if step > current + 1 then
  return {-1, 'step ' .. step .. ' is more than one ahead of the current version ' .. current}
end

local overage = meta('overage')
if overage == 'drop' then
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', P .. ':ready', '-inf', step * 1e9)) do
    local g = fields(group_key(group))
    redis.call('ZREM', P .. ':ready', group)
    change_due(g.due, -1)
    bump('groups_ready', -1)
    bump('groups_dropped_over_age', 1)
    for _, name in ipairs(members(group)) do
      local e = fields(episode_key(name))
      if e.state == 'completed' then
        discard_payload(name, e)
        bump('dropped', 1)
      end
    end
    forget_group(group)
  end
end

local chosen = redis.call('ZRANGE', P .. ':ready', 0, per_step - 1)
if #chosen < per_step then
  return {0, #chosen .. ' of ' .. per_step .. ' groups ready, ' .. metan('groups_admitted') .. ' in flight, ' ..
    redis.call('ZCARD', P .. ':queue') .. ' queued'}
end
-- Shipping (invariant 3): what stays behind must still be able to ship in time.
local counts, dues = due_counts(), {}
for i, group in ipairs(chosen) do
  dues[i] = tonumber(redis.call('HGET', group_key(group), 'due'))
  counts[dues[i]] = counts[dues[i]] - 1
end
if overage == 'wait' then
  for t = step, current + metan('max_staleness') + 1 do
    if count_until(counts, t) > (t - step) * per_step then
      return {0, count_until(counts, t) .. ' slow groups are due by step ' .. t .. '; newer ones may not overtake them'}
    end
  end
end
for i, group in ipairs(chosen) do
  redis.call('ZREM', P .. ':ready', group)
  redis.call('HSET', group_key(group), 'state', 'shipped')
  change_due(dues[i], -1)
  redis.call('RPUSH', key, group)
end
bump('groups_ready', -#chosen)
bump('groups_shipped', #chosen)
redis.call('HSET', META, 'next_step', step + 1)
return composition()
