// The API key, if the server needs one. Kept for this tab, until it is closed.

const NAME = "evenflow-api-key";

export function authorization() {
  const key = sessionStorage.getItem(NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function askForKey(onKey) {
  const form = document.getElementById("key-form");
  const field = document.getElementById("key");
  form.hidden = false;
  form.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(NAME, field.value.trim());
    field.value = "";
    form.hidden = true;
    onKey();
  };
}

// The message of an error response in OpenAI's format.
export async function refusal(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${response.status}.`;
}
