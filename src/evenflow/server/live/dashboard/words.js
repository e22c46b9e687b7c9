// Formats figures and causes as text.

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds >= 9.95) return `${seconds.toFixed(0)} s`;
  if (seconds >= 0.9995) return `${seconds.toFixed(1)} s`;
  const ms = 1000 * seconds;
  return `${ms >= 9.95 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function share(part) {
  return part === null || part === undefined ? "–" : `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)}%`;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

const request = (number) => (number ? `request ${number}` : "a request");

const CAUSES = {
  decodes: () => "decodes",
  prefill: (who, tokens) => `prefill of ${request(who)} (${plural(tokens, "token")})`,
  unexplained: () => "a step slower than predicted",
  host: () => "work between steps",
  garbage_collection: () => "garbage collection",
  kv_memory: () => "waiting for KV memory",
};

const REASONS = {
  end_of_prompt: "the prompt ended",
  budget: "the step's token budget was used up",
  chunk_size: "of the policy's chunk size",
  long_prefill: "of the limit for one prompt",
  alignment: "the size was rounded for speed",
  floor: "only the minimum that keeps prefill moving fitted",
  latency: "more would have made a token late",
  turn: "another tenant's first token would have come later",
  warm_up: "no larger step has been measured yet",
  shed: "the step was slow, and left out the rest to be on time",
};

const causesInWords = (gap, causes) =>
  causes
    .filter(([, seconds]) => seconds >= 0.02 * gap)
    .map(([kind, seconds, who, tokens]) => `${duration(seconds)} ${CAUSES[kind]?.(who, tokens) ?? kind}`);

// A request from arrival to end, as rows of a table: when, what, how long, why.
export function eventsOfLife(life) {
  const cached = life.cached_tokens ? `, ${count(life.cached_tokens)} of them cached` : "";
  const events = [
    { at: 0, texts: [`arrived with ${plural(life.prompt_tokens, "prompt token")}${cached}`, "", ""] },
    { at: life.queue_s, texts: ["left the queue", duration(life.queue_s), ""] },
    ...life.chunks.map((chunk) => ({
      at: chunk.end_s,
      texts: [
        `tokens ${count(chunk.start)} to ${count(chunk.start + chunk.length)} (${count(chunk.length)})`,
        duration(chunk.seconds),
        `no longer because ${REASONS[chunk.reason] ?? chunk.reason}`,
      ],
    })),
    { at: life.ttft_s, texts: ["first token", duration(life.ttft_s), ""] },
    ...life.late.map(({ at_s, gap_s, late_s, causes }) => {
      const words = causesInWords(gap_s, causes.map(({ kind, seconds, tokens }) => [kind, seconds, 0, tokens]));
      return {
        at: at_s,
        isLate: true,
        texts: [`a token ${duration(late_s)} too late`, duration(gap_s), words.join(", ")],
      };
    }),
    { at: life.end_s, texts: [`ended with ${plural(life.output_tokens ?? 0, "token")}: ${life.finish_reason}`, "", ""] },
  ];
  return events
    .filter(({ at }) => at !== null)
    .sort((one, other) => one.at - other.at)
    .map(({ at, isLate, texts }) => ({ isLate, texts: [duration(at), ...texts] }));
}

export function stallInWords(stall) {
  const causes = causesInWords(stall.gap, stall.causes);
  const others = stall.streams > 1 ? `, and ${plural(stall.streams - 1, "other")} with it` : "";
  return { gap: `A token of ${request(stall.request)} waited ${duration(stall.gap)}`, causes: `${others}: ${causes.join(", ")}.` };
}

export function stepInWords(step) {
  const parts = [];
  if (step.decodes) parts.push(`${plural(step.decodes, "decode")} ${duration(step.decodeSeconds)}`);
  for (const chunk of step.chunks) {
    const end = chunk.start + chunk.length;
    parts.push(
      `${request(chunk.request)} tokens ${count(chunk.start)} to ${count(end)} (${count(chunk.length)}) ` +
        `${duration(chunk.seconds)}, no longer because ${REASONS[chunk.reason] ?? chunk.reason}`,
    );
  }
  const predicted = step.predicted ? `, predicted ${duration(step.predicted)}` : "";
  const late = step.late ? ` ${plural(step.late, "late token")}.` : "";
  return `Step ${step.step}: ${duration(step.seconds)}${predicted}. ${parts.join("; ")}.${late}`;
}
