-- Fixed steps: how many episodes and payload bytes each holds.
local function step_groups(step)
  local packed = call('HGET', STEPS, 'batch:' .. step)
  return packed and cmsgpack.unpack(packed) or {}
end

local function weigh(groups)
  local episodes, bytes = 0, 0
  for _, group in ipairs(groups) do
    for _, episode in ipairs(group) do
      local task_id, m = split_episode(episode)
      episodes = episodes + 1
      bytes = bytes + tonumber(call('HGET', group_key(task_id), 'h' .. m) or 0)
    end
  end
  return episodes, bytes
end

-- The step's payloads no longer hold admission back.
local function count_trained(groups)
  local episodes, bytes = weigh(groups)
  count('trained', episodes)
  add_bytes(0, -bytes)
  return episodes
end
